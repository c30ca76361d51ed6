# Other scripts source this file: it finds a Python, makes .venv and installs the project into it.
# After prepare_environment, $VENV_PYTHON is the interpreter to use. find_python only prints a suitable interpreter.
# PYTHON=/path/to/python3.12 selects another interpreter. hosts_environment.sh changes what stands before the functions.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
INSTALL_STAMP="$VENV/.megatron-fssdp-installed"
CONSTRAINTS=constraints.txt
SUITABLE_PYTHON="Python 3.12 or newer"
SUITABLE_VERSIONS="sys.version_info >= (3, 12)"

# Installs everything into the environment.
_install_packages() {
  _pip_install --editable "${ROOT}[dev]"
}

_pip_install() {
  "$VENV_PYTHON" -m pip install --disable-pip-version-check --progress-bar off --constraint "$ROOT/$CONSTRAINTS" "$@"
}

# Succeeds if the interpreter runs (a pyenv shim may not), has a suitable version and can make environments.
_is_suitable() {
  "$1" -c "import sys, ensurepip, ssl, venv; sys.exit(not $SUITABLE_VERSIONS)" >/dev/null 2>&1
}

# Prints the places where a Python may be; the version that is tested most comes first.
_python_candidates() {
  local version folder
  for version in 3.12 3.13 3.14; do
    type -aP "python$version" || true
  done
  type -aP python3 || true
  type -aP python || true
  for version in 3.12 3.13 3.14; do
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin \
      "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-"$version"*/bin \
      "$HOME"/{miniconda3,miniforge3,anaconda3}{,/envs/*}/bin \
      /usr/local/bin /usr/local/opt/python@"$version"/bin /opt/homebrew/bin /opt/python*/bin /opt/*/bin \
      "/opt/python/$version"*/bin; do
      if [[ -x "$folder/python$version" ]]; then echo "$folder/python$version"; fi
    done
  done
  if command -v uv >/dev/null; then uv python find --no-project '>=3.12' 2>/dev/null || true; fi
}

# Prints a suitable interpreter, or explains on stderr why none was found.
find_python() {
  local candidate looked_at=()
  if [[ -n "${PYTHON:-}" ]]; then
    if _is_suitable "$PYTHON"; then
      type -P "$PYTHON"
      return
    fi
    echo "error: PYTHON=$PYTHON is not a working $SUITABLE_PYTHON with venv; set PYTHON to another one" >&2
    return 1
  fi
  while IFS= read -r candidate; do
    if _is_suitable "$candidate"; then
      echo "$candidate"
      return
    fi
    looked_at+=("$candidate ($("$candidate" --version 2>/dev/null || echo 'does not run'))")
  done < <(_python_candidates | awk '!seen[$0]++')
  {
    echo "error: no working $SUITABLE_PYTHON with venv was found."
    echo "Looked on PATH, in pyenv, uv, conda, Homebrew, /usr/local and /opt:"
    if ((${#looked_at[@]})); then printf '  %s\n' "${looked_at[@]}"; else echo "  no Python found"; fi
    echo "Install one (for instance: uv python install 3.12), or set PYTHON=/path/to/python3.12"
  } >&2
  return 1
}

# Prints a hash that changes when the environment must be installed again.
_environment_hash() {
  "$VENV_PYTHON" - "$ROOT" pyproject.toml setup.py "$CONSTRAINTS" <<'PYTHON_CODE'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(f"{sys.version} {root}\n".encode())
for name in sys.argv[2:]:
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON_CODE
}

_install() {
  local python log name="${VENV##*/}"
  if ! _is_suitable "$VENV_PYTHON"; then
    if [[ -L "$VENV" ]]; then
      echo "error: $VENV is a link, and its target has no working $SUITABLE_PYTHON; remove the link" >&2
      return 1
    fi
    python="$(find_python)" || return 1
    echo "environment: creating $name with $("$python" --version) ($python)"
    "$python" -m venv --clear "$VENV" || return 1
  fi
  if [[ "$(cat "$INSTALL_STAMP" 2>/dev/null)" == "$(_environment_hash)" ]]; then
    echo "environment: $name is up to date"
    # Kernels that were changed since are compiled again. Without a compiler they run as plain Python.
    (cd "$ROOT" && "$VENV_PYTHON" setup.py --quiet build_ext --inplace >/dev/null 2>&1) || true
    return
  fi
  log="$VENV/install.log"
  echo "environment: installing into $name, which takes some minutes the first time (log: $log)"
  rm -f "$INSTALL_STAMP"
  if ! _install_packages >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    echo "error: the installation failed; the whole output is in $log" >&2
    return 1
  fi
  _environment_hash >"$INSTALL_STAMP"
}

# Makes .venv and installs the project, unless that was done. Scripts that run at the same time wait for each other.
prepare_environment() {
  local lock
  lock="${TMPDIR:-/tmp}/megatron-fssdp-$(id -u)-$(printf '%s' "$ROOT" | cksum | cut -d ' ' -f 1).lock"
  (
    if command -v flock >/dev/null; then
      flock -n 9 || { echo "environment: waiting for another installation" && flock 9; }
    fi
    _install
  ) 9>"$lock"
}
