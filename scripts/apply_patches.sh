#!/usr/bin/env bash
# Adds the plugin's lines to the training scripts of a Megatron-LM checkout with `git apply`, so that they accept
# --moe-strategy without the launcher, or removes these lines again. See patches/README.md.
# usage: bash scripts/apply_patches.sh CHECKOUT [--check|--revert]
# exit:  0 done, or nothing to do; 2 refused, and nothing is changed
set -euo pipefail

PATCHES="$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd)"
# Our lines are added after this line. The diffs contain no lines of Megatron, so the script checks it.
ANCHOR='if __name__ == "__main__":'
LAUNCHER="use the launcher, which needs no patch: torchrun … -m megatron_fssdp SCRIPT.py …"

refuse() {
  echo "error: $1" >&2
  exit 2
}

checkout="${1:-}" mode="${2:---apply}"
if (($# > 2)) || [[ ! "$mode" =~ ^--(apply|check|revert)$ ]]; then
  refuse "usage: bash scripts/apply_patches.sh CHECKOUT [--check|--revert]"
fi
info="$checkout/megatron/core/package_info.py"
[[ -f "$info" ]] || refuse "got '$checkout', which has no megatron/core/package_info.py; give a checkout of Megatron-LM"
command -v git >/dev/null || refuse "git was not found; install it, or $LAUNCHER"
release="$(sed -nE 's/^(MAJOR|MINOR) *= *([0-9]+).*/\2/p' "$info" | paste -sd .)"
diff="$(grep -lx "Version: $release" "$PATCHES"/*.diff)" ||
  refuse "$checkout is Megatron-LM $release, wanted $(sed -n 's/^Version: //p' "$PATCHES"/*.diff | paste -sd ' '); $LAUNCHER"

# Neither a repository around the checkout nor one in the environment may affect git.
apply() {
  (cd "$checkout" && env -u GIT_DIR -u GIT_WORK_TREE -u GIT_INDEX_FILE GIT_CEILING_DIRECTORIES="$(dirname "$PWD")" \
    git apply --unidiff-zero --whitespace=nowarn "$@" "$diff")
}

pending=()
while read -r path line; do
  state=stock
  if apply -R --check --include="$path" 2>/dev/null; then
    state=patched
  elif [[ "$(sed -n "${line}p" "$checkout/$path" 2>/dev/null)" != "$ANCHOR" ]] || grep -q megatron_fssdp "$checkout/$path"; then
    refuse "$path is not the script of $(basename "$diff" .diff): line $line must be «$ANCHOR», and megatron_fssdp must \
not be there yet; nothing was changed. Add the lines of the patch by hand below that line, or $LAUNCHER"
  fi
  echo "$path: $state"
  if [[ "$mode $state" == "--apply stock" || "$mode $state" == "--revert patched" ]]; then pending+=("--include=$path"); fi
done < <(sed -nE 's|^\+\+\+ b/||p; s/^@@ -([0-9]+),0 .*/\1/p' "$diff" | paste - -)
((${#pending[@]})) || exit 0
[[ "$mode" == --apply ]] || pending+=(-R)
apply "${pending[@]}" || refuse "$(basename "$diff") does not apply; nothing was changed"
echo "${mode#--}: done"
