#!/usr/bin/env bash
# Adds the plugin's lines to the training scripts of a Megatron-LM checkout, so that they accept --moe-strategy
# without the launcher, or removes these lines again. See patches/README.md.
# usage: bash scripts/apply_patches.sh CHECKOUT [--check|--revert]
# exit:  0 done, or nothing to do; 2 refused, and nothing is changed
set -euo pipefail

patches="$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd)"
anchor='if __name__ == "__main__":' # our lines follow it; the diffs contain no line of Megatron's

refuse() {
  echo "error: $1; nothing was changed" >&2
  exit 2
}

# Applies the diff with git or patch(1): `change --check`, `change -R --check`, `change`, `change -R`.
change() {
  if command -v git >/dev/null; then # a repository around the checkout must not matter
    (cd "$checkout" && env -u GIT_DIR GIT_CEILING_DIRECTORIES="$(dirname "$checkout")" \
      git apply --unidiff-zero --whitespace=nowarn "$@" "$diff") 2>/dev/null
  elif command -v patch >/dev/null; then
    (cd "$checkout" && patch -p1 --batch --silent --forward "${@/--check/--dry-run}" -i "$diff") >/dev/null
  else
    refuse "neither git nor patch was found, wanted one of them"
  fi
}

(($# == 1 || $# == 2)) && [[ "${2:-}" =~ ^(--check|--revert)?$ ]] ||
  refuse "usage: bash scripts/apply_patches.sh CHECKOUT [--check|--revert]"
info="$1/megatron/core/package_info.py"
[[ -f "$info" ]] || refuse "$1: has no megatron/core/package_info.py, wanted a checkout of Megatron-LM"
checkout="$(cd "$1" && pwd)" mode="${2:-}"
release="$(sed -n 's/^MAJOR = //p; s/^MINOR = /./p' "$info" | tr -d '\n')"
diff="$(grep -lx "Version: $release" "$patches"/*.diff | head -n 1)" ||
  refuse "$checkout: is Megatron-LM $release, wanted one of $(sed -n 's/^Version: //p' "$patches"/*.diff | xargs); use the launcher"

if change -R --check; then
  [[ "$mode" == --revert ]] && change -R && echo "$checkout: the lines of $(basename "$diff") are removed" && exit
  echo "$checkout: is patched already ($(basename "$diff"))" && exit
fi
while read -r file line; do
  [[ "$(sed -n "${line}p" "$checkout/$file" 2>/dev/null)" == "$anchor" ]] && ! grep -q megatron_fssdp "$checkout/$file" ||
    refuse "$file: wanted «$anchor» in line $line and no other megatron_fssdp; add the lines of $(basename "$diff") by hand, or use the launcher"
done < <(paste -d' ' <(sed -n 's#^+++ b/##p' "$diff") <(sed -n 's/^@@ -\([0-9]*\),0 .*/\1/p' "$diff"))
[[ "$mode" != --revert ]] || { echo "$checkout: is not patched" && exit; }
change --check || refuse "$(basename "$diff") does not apply to $checkout"
[[ "$mode" == --check ]] && echo "$checkout: can be patched ($(basename "$diff"))" && exit
change && echo "$checkout: is patched ($(basename "$diff"))"
