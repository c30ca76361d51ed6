#!/usr/bin/env bash
# Adds the plugin's lines to the training scripts of a Megatron-LM checkout, so that they accept
# --moe-strategy without the launcher, or removes these lines again. See patches/README.md.
# usage: bash scripts/apply_patches.sh CHECKOUT [--check|--revert]
# exit:  0 done, or nothing to do; 2 refused, and nothing is changed
set -euo pipefail

PATCHES="$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd)"
USAGE="usage: bash scripts/apply_patches.sh CHECKOUT [--check|--revert]"
# Our lines are added after this line. The diffs contain no lines of Megatron, so the script checks it.
ANCHOR='if __name__ == "__main__":'

refuse() {
  echo "error: $1" >&2
  exit 2
}

# Reads the command line; sets checkout and mode.
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
  [[ -d "$checkout" ]] || refuse "$checkout is not a folder; give a checkout of Megatron-LM"
  checkout="$(cd "$checkout" && pwd)"
}

# Reads the version of the checkout; sets version (for example 0.19.1) and release (0.19).
find_version() {
  local info="$checkout/megatron/core/package_info.py" line major="" minor="" patch=""
  [[ -f "$info" ]] || refuse "$checkout has no megatron/core/package_info.py; give a checkout of Megatron-LM"
  while IFS= read -r line || [[ -n "$line" ]]; do
    if [[ "$line" =~ ^(MAJOR|MINOR|PATCH)[[:space:]]*=[[:space:]]*([0-9]+) ]]; then
      case "${BASH_REMATCH[1]}" in
        MAJOR) major="${BASH_REMATCH[2]}" ;;
        MINOR) minor="${BASH_REMATCH[2]}" ;;
        PATCH) patch="${BASH_REMATCH[2]}" ;;
      esac
    fi
  done <"$info"
  [[ -n "$major" && -n "$minor" ]] || refuse "$info states no version; it must set MAJOR and MINOR"
  release="$major.$minor"
  version="$release${patch:+.$patch}"
}

# Finds the patch for this release; sets diff.
find_diff() {
  local candidate known=()
  diff=""
  for candidate in "$PATCHES"/*.diff; do
    known+=("$(sed -n 's/^Version: //p' "$candidate") ($(basename "$candidate" .diff))")
    if grep -qx "Version: $release" "$candidate"; then diff="$candidate"; fi
  done
  [[ -n "$diff" ]] || refuse "$checkout is Megatron-LM $version, for which there is no patch; there is one for \
$(printf '%s, ' "${known[@]}" | sed 's/, $//'). Use the launcher, which needs no patch: torchrun … -m megatron_fssdp SCRIPT.py …"
}

# Reads the patch; sets paths, and for each path: after (number of the line that our lines follow), added (our
# lines) and part (the part of the diff for this file).
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

# Looks at one file of the checkout; sets state: stock, patched, or the reason to refuse the file.
find_state() {
  local path="$1" lines number count ours
  state=""
  if [[ ! -f "$checkout/$path" ]]; then
    state="does not exist"
    return
  fi
  mapfile -t lines <"$checkout/$path"
  number="${after[$path]}"
  count="$(printf '%s' "${added[$path]}" | wc -l)"
  ours="$(printf '%s\n' "${lines[@]:number:count}" && echo .)"
  if [[ "${lines[number - 1]:-}" != "$ANCHOR" ]]; then
    state="has «${lines[number - 1]:-}» in line $number instead of «$ANCHOR»: it is not the script of $(basename "$diff" .diff)"
  elif [[ "$ours" == "${added[$path]}." ]]; then
    state=patched
  elif grep -q megatron_fssdp "$checkout/$path"; then
    state="mentions megatron_fssdp already, but differs from the patch"
  else
    state=stock
  fi
}

# Prints a file with our lines added.
with_lines() {
  local file="$1" path="$2"
  head -n "${after[$path]}" "$file"
  printf '%s' "${added[$path]}"
  tail -n "+$((after[$path] + 1))" "$file"
}

# Succeeds if a changed copy differs from the checkout's file by our lines only.
is_as_wanted() {
  local folder="$1" path="$2" stock patched
  stock="$checkout/$path" patched="$folder/$path"
  if [[ "$mode" == revert ]]; then stock="$folder/$path" patched="$checkout/$path"; fi
  [[ "$(with_lines "$stock" "$path" && echo .)" == "$(cat "$patched" && echo .)" ]]
}

# Applies the parts of the diff to the copies in a folder, with git or patch(1).
change_copies() {
  local folder="$1" reverse=()
  [[ "$mode" == apply ]] || reverse=(-R)
  if command -v git >/dev/null; then
    # The folder is not a repository. Repositories around it or in the environment must not affect git.
    (cd "$folder" && env -u GIT_DIR -u GIT_WORK_TREE -u GIT_INDEX_FILE GIT_CEILING_DIRECTORIES="$(dirname "$folder")" \
      git apply --unidiff-zero --whitespace=nowarn "${reverse[@]}" changes.diff)
  elif command -v patch >/dev/null; then
    (cd "$folder" && patch -p1 -s "${reverse[@]}" -i changes.diff)
  else
    refuse "neither git nor patch was found; install one of them"
  fi
}

# Installs the changed copies in the checkout. They are written beside the old files first; then all are renamed.
install_copies() {
  local folder="$1" path target moved=()
  shift
  for path in "$@"; do
    target="$(readlink -f "$checkout/$path")"
    moved+=("$target")
    rm -f "$target.megatron-fssdp-new" 2>/dev/null || true # left behind by a killed run
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
    *) refuse "$path $state; nothing was changed. Add the lines of patches/$(basename "$diff") by hand \
as the first ones below «$ANCHOR», or use the launcher: torchrun … -m megatron_fssdp SCRIPT.py …" ;;
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
  is_as_wanted "$copies" "$path" || refuse "$path: the patched copy is not as expected; nothing was changed"
done
install_copies "$copies" "${pending[@]}"
for path in "${pending[@]}"; do
  count="$(printf '%s' "${added[$path]}" | wc -l)"
  if [[ "$mode" == apply ]]; then did="added"; else did="removed"; fi
  echo "$path: $did $((count)) lines after line ${after[$path]}"
done
