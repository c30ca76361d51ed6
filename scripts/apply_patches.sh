#!/usr/bin/env bash
# Adds the plugin's lines to the training scripts of a Megatron-LM checkout, so that they know
# --moe-strategy without the launcher, or takes them out again. See patches/README.md.
# usage: bash scripts/apply_patches.sh CHECKOUT [--check|--revert]
# exit:  0 done, or nothing to do; 2 refused, and nothing was changed
set -euo pipefail

PATCHES="$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd)"
USAGE="usage: bash scripts/apply_patches.sh CHECKOUT [--check|--revert]"
# The line that ours come behind. The diffs carry none of Megatron's, so it is checked here.
ANCHOR='if __name__ == "__main__":'

refuse() {
  echo "error: $1" >&2
  exit 2
}

# Sets checkout and mode.
read_arguments() {
  local argument
  checkout="" mode=apply
  for argument in "$@"; do
    case "$argument" in
      --check | --revert)
        [[ "$mode" == apply ]] || refuse "--check and --revert exclude each other; $USAGE"
        mode="${argument#--}"
        ;;
      -h | --help)
        echo "$USAGE"
        exit 0
        ;;
      -*) refuse "unknown option $argument; $USAGE" ;;
      *)
        [[ -z "$checkout" ]] || refuse "got two checkouts, $checkout and $argument; $USAGE"
        checkout="$argument"
        ;;
    esac
  done
  [[ -n "$checkout" ]] || refuse "no checkout was given; $USAGE"
  [[ -d "$checkout" ]] || refuse "$checkout is no folder, wanted a checkout of Megatron-LM"
  checkout="$(cd "$checkout" && pwd)"
}

# Sets version (for example 0.19.1) and release (0.19) from what the checkout says of itself.
find_version() {
  local info="$checkout/megatron/core/package_info.py" line major="" minor="" patch=""
  [[ -f "$info" ]] || refuse "$checkout has no megatron/core/package_info.py, wanted a checkout of Megatron-LM"
  while IFS= read -r line || [[ -n "$line" ]]; do
    if [[ "$line" =~ ^(MAJOR|MINOR|PATCH)[[:space:]]*=[[:space:]]*([0-9]+) ]]; then
      case "${BASH_REMATCH[1]}" in
        MAJOR) major="${BASH_REMATCH[2]}" ;;
        MINOR) minor="${BASH_REMATCH[2]}" ;;
        PATCH) patch="${BASH_REMATCH[2]}" ;;
      esac
    fi
  done <"$info"
  [[ -n "$major" && -n "$minor" ]] || refuse "$info names no version, wanted MAJOR and MINOR in it"
  release="$major.$minor"
  version="$release${patch:+.$patch}"
}

# Sets diff, the file that is for this release.
find_diff() {
  local candidate known=()
  diff=""
  for candidate in "$PATCHES"/*.diff; do
    known+=("$(sed -n 's/^Version: //p' "$candidate") ($(basename "$candidate" .diff))")
    if grep -qx "Version: $release" "$candidate"; then diff="$candidate"; fi
  done
  [[ -n "$diff" ]] || refuse "$checkout is Megatron-LM $version, for which there is no patch; there is one for \
$(printf '%s, ' "${known[@]}" | sed 's/, $//'). The launcher needs none: torchrun … -m megatron_fssdp SCRIPT.py …"
}

# Sets paths, and by path: after (the line that ours follow), added (ours), part (this file's piece of the diff).
read_diff() {
  local line path=""
  paths=()
  declare -gA after=() added=() part=()
  while IFS= read -r line || [[ -n "$line" ]]; do
    if [[ "$line" =~ ^diff\ --git\ a/(.*)\ b/ ]]; then
      path="${BASH_REMATCH[1]}"
      paths+=("$path")
      added[$path]="" part[$path]=""
    fi
    [[ -n "$path" ]] || continue
    part[$path]+="$line"$'\n'
    if [[ "$line" =~ ^@@\ -([0-9]+),0\  ]]; then
      after[$path]="${BASH_REMATCH[1]}"
    elif [[ "$line" == +* && "$line" != +++* ]]; then
      added[$path]+="${line#+}"$'\n'
    fi
  done <"$diff"
}

# Sets state of a file of the checkout: stock, patched, or a reason to refuse it.
find_state() {
  local path="$1" lines number count ours
  state=""
  if [[ ! -f "$checkout/$path" ]]; then
    state="is not there"
    return
  fi
  mapfile -t lines <"$checkout/$path"
  number="${after[$path]}"
  count="$(printf '%s' "${added[$path]}" | wc -l)"
  ours="$(printf '%s\n' "${lines[@]:number:count}" && echo .)"
  if [[ "${lines[number - 1]:-}" != "$ANCHOR" ]]; then
    state="has «${lines[number - 1]:-}» in line $number, wanted «$ANCHOR»: it is not the script of $(basename "$diff" .diff)"
  elif [[ "$ours" == "${added[$path]}." ]]; then
    state=patched
  elif grep -q megatron_fssdp "$checkout/$path"; then
    state="mentions megatron_fssdp already, otherwise than the patch does"
  else
    state=stock
  fi
}

# Prints a file with our lines put in.
with_lines() {
  local file="$1" path="$2"
  head -n "${after[$path]}" "$file"
  printf '%s' "${added[$path]}"
  tail -n "+$((after[$path] + 1))" "$file"
}

# Whether a changed copy differs from the checkout's file by our lines alone.
is_as_wanted() {
  local folder="$1" path="$2" stock patched
  stock="$checkout/$path" patched="$folder/$path"
  if [[ "$mode" == revert ]]; then stock="$folder/$path" patched="$checkout/$path"; fi
  [[ "$(with_lines "$stock" "$path" && echo .)" == "$(cat "$patched" && echo .)" ]]
}

# Applies the diff's parts to copies in a folder, by git or by patch(1).
change_copies() {
  local folder="$1" reverse=()
  [[ "$mode" == apply ]] || reverse=(-R)
  if command -v git >/dev/null; then
    # The folder is no repository, and none around it or in the environment has a say.
    (cd "$folder" && env -u GIT_DIR -u GIT_WORK_TREE -u GIT_INDEX_FILE GIT_CEILING_DIRECTORIES="$(dirname "$folder")" \
      git apply --unidiff-zero --whitespace=nowarn "${reverse[@]}" changes.diff)
  elif command -v patch >/dev/null; then
    (cd "$folder" && patch -p1 -s "${reverse[@]}" -i changes.diff)
  else
    refuse "neither git nor patch was found; install one of them"
  fi
}

# Puts the changed copies into the checkout: written beside the old files first, then all are renamed.
install_copies() {
  local folder="$1" path target moved=()
  shift
  for path in "$@"; do
    target="$(readlink -f "$checkout/$path")"
    moved+=("$target")
    rm -f "$target.megatron-fssdp-new" 2>/dev/null || true # of one that was killed
    if [[ -e "$target.megatron-fssdp-new" ]] || ! cp -p "$folder/$path" "$target.megatron-fssdp-new" 2>/dev/null; then
      for target in "${moved[@]}"; do rm -f "$target.megatron-fssdp-new" 2>/dev/null || true; done
      refuse "$path.megatron-fssdp-new cannot be written; nothing was changed"
    fi
  done
  trap '' INT TERM HUP
  for target in "${moved[@]}"; do mv -f "$target.megatron-fssdp-new" "$target"; done
  trap - INT TERM HUP
}

read_arguments "$@"
find_version
find_diff
read_diff
echo "$checkout: Megatron-LM $version, patches/$(basename "$diff")"

wanted=patched from=stock
if [[ "$mode" == revert ]]; then wanted=stock from=patched; fi
pending=()
for path in "${paths[@]}"; do
  find_state "$path"
  case "$state" in
    "$from") pending+=("$path") ;;
    stock | patched) ;;
    *) refuse "$path $state; nothing was changed. By hand: add the lines of patches/$(basename "$diff") as the first \
ones below «$ANCHOR», or use the launcher: torchrun … -m megatron_fssdp SCRIPT.py …" ;;
  esac
  if [[ "$mode" == check ]]; then
    if [[ "$state" == stock ]]; then echo "$path: can be patched"; else echo "$path: is patched"; fi
  elif [[ "$state" == "$wanted" ]]; then
    if [[ "$mode" == apply ]]; then echo "$path: is patched already"; else echo "$path: is not patched"; fi
  fi
done
if [[ "$mode" == check || "${#pending[@]}" == 0 ]]; then exit 0; fi

copies="$(mktemp -d)"
trap 'rm -rf "$copies"' EXIT
for path in "${pending[@]}"; do
  mkdir -p "$copies/$(dirname "$path")"
  cp -p "$checkout/$path" "$copies/$path"
  printf '%s' "${part[$path]}" >>"$copies/changes.diff"
done
change_copies "$copies" || refuse "patches/$(basename "$diff") does not apply; nothing was changed"
for path in "${pending[@]}"; do
  is_as_wanted "$copies" "$path" || refuse "$path: the change went wrong; nothing was changed"
done
install_copies "$copies" "${pending[@]}"
for path in "${pending[@]}"; do
  count="$(printf '%s' "${added[$path]}" | wc -l)"
  if [[ "$mode" == apply ]]; then did="added"; else did="took out"; fi
  echo "$path: $did $((count)) lines behind line ${after[$path]}"
done
