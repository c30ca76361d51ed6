#!/usr/bin/env bash
# Makes one folder with everything that a GPU machine without a network needs for scripts/gpu_check.sh: the project, and
# wheels of all packages but torch and what torch brings. Copy the folder there, and run the command that is printed.
# usage: bash scripts/offline_bundle.sh OUT [--python VERSION] [--platform NAME] [--split MIB]
#   OUT               new folder
#   --python VERSION  Python of the other machine (default: that of .venv, for which the planning kernels are compiled)
#   --platform NAME   its platform (default: manylinux_2_28_x86_64)
#   --split MIB       also pack the folder into files OUT.part* of so many MiB; there: cat OUT.part* | tar x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

refuse() {
  echo "error: $1" >&2
  exit 2
}

out="" version="" platform=manylinux_2_28_x86_64 split=""
while (($#)); do
  case "$1" in
    --python | --platform | --split)
      [[ -n "${2:-}" ]] || refuse "$1: got nothing, wanted a value"
      case "$1" in --python) version="$2" ;; --platform) platform="$2" ;; --split) split="$2" ;; esac
      shift
      ;;
    -*) refuse "$1: unknown option; see the usage at the top of scripts/offline_bundle.sh" ;;
    *) [[ -z "$out" ]] || refuse "$1: got a second folder, wanted one" && out="$1" ;;
  esac
  shift
done
[[ -n "$out" ]] || refuse "usage: bash scripts/offline_bundle.sh OUT [--python VERSION] [--platform NAME] [--split MIB]"
[[ ! -e "$out" ]] || refuse "$out: exists already; give a new folder"
[[ -z "$split" || "$split" =~ ^[1-9][0-9]*$ ]] || refuse "--split: got '$split', wanted a number of MiB"

prepare_environment
own_version="$("$VENV_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
version="${version:-$own_version}"
mkdir -p "$(dirname "$out")"
partial="$(mktemp -d "$out.XXXXXX")"
trap 'rm -rf "$partial"' EXIT

echo "bundle: wheels for Python $version on $platform"
"$VENV_PYTHON" "$ROOT/scripts/bundled_packages.py" >"$partial/packages.txt"
"$VENV_PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version "$version" --platform "$platform" --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --requirement "$partial/packages.txt" --dest "$partial/wheels"

echo "bundle: the project"
mkdir "$partial/project"
(cd "$ROOT" && git ls-files -z | tar --create --null --files-from=-) | tar --extract --directory "$partial/project"
# Without metadata, the check could not say which commit it is.
commit="$(git -C "$ROOT" rev-parse --short HEAD)"
metadata="$partial/project/megatron_fssdp-0.1.0+g$commit.dist-info"
mkdir "$metadata"
printf 'Metadata-Version: 2.1\nName: megatron-fssdp\nVersion: 0.1.0+g%s\n' "$commit" >"$metadata/METADATA"
if [[ "$version" == "$own_version" ]]; then
  (cd "$ROOT" && find megatron_fssdp -name '*.so' -print0 | tar --create --null --files-from=-) |
    tar --extract --directory "$partial/project"
fi

chmod 755 "$partial"
mv "$partial" "$out"
trap - EXIT
if [[ -n "$split" ]]; then
  tar --create --directory "$(dirname "$out")" "$(basename "$out")" | split --bytes="${split}M" - "$out.part"
fi
name="$(basename "$out")"
echo "bundle: $(du -sh "$out" | cut -f 1) in $out; on the other machine:"
echo "  bash $name/project/scripts/gpu_check.sh --bundle $name --python python3"
