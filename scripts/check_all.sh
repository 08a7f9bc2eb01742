#!/usr/bin/env bash
# Proves a release: scripts/check_all.sh [--no-suite]
#
# ruff, ruff format, mypy, the suite, the wheel built, the wheel installed in a clean
# environment elsewhere, and the suite again on the installed wheel, from a copy of
# test/ beside which the packages do not lie. Stops at the first failure.
#   --no-suite    leaves out the first run of the suite
set -euo pipefail
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
show_help "$0" "${1-}"

case ${1-} in
  '' | --no-suite) ;;
  *) die "unknown argument $1: expected nothing or --no-suite" ;;
esac

ensure_venv dev
cd "$ROOT"
elsewhere=$(mktemp -d)
step=""
# shellcheck disable=SC2317  # called by the trap
finish() {
  local code=$?
  rm -rf "$elsewhere"
  if ((code)); then say "FAILED: $step"; fi
}
trap finish EXIT

begin() {
  step=$1
  say "$step"
}

# Copies to $1 what git knows or would take, narrowed to the paths $2...
copy_tree() {
  local target=$1
  shift
  mkdir -p "$target"
  git ls-files -z --cached --others --exclude-standard -- "$@" |
    tar --null -T - -cf - | tar -xf - -C "$target"
}

begin "ruff"
"$VENV_PYTHON" -m ruff check .
begin "ruff format"
"$VENV_PYTHON" -m ruff format --check .
begin "mypy"
"$VENV_PYTHON" -m mypy
if [[ ${1-} != --no-suite ]]; then
  begin "the suite on the source tree"
  "$VENV_PYTHON" -m pytest -n 2 --dist worksteal
fi

begin "building the wheel"
# From a copy: build/ in the tree would carry over modules that no longer exist.
copy_tree "$elsewhere/source" .
"$VENV_PYTHON" -m pip wheel --no-deps --wheel-dir "$elsewhere/wheel" \
  "$elsewhere/source"
wheel=("$elsewhere"/wheel/*.whl)

begin "installing the wheel in a clean environment"
make_venv "$elsewhere/venv"
install_with_tensorflow "$elsewhere/venv" "${wheel[0]}[test]"
install_keras_2 "$elsewhere/venv"

begin "the suite on the installed wheel"
copy_tree "$elsewhere/copy" . \
  ':!memory_saving_gradients' ':!mem_util'
cd "$elsewhere/copy"
"$elsewhere/venv/bin/python" - <<'PY'
import pathlib, sys
import mem_util, memory_saving_gradients
for package in (memory_saving_gradients, mem_util):
    folder = pathlib.Path(package.__file__).parent
    if "site-packages" not in folder.parts or not (folder / "py.typed").exists():
        sys.exit(f"{folder} is not the installed wheel, or has no py.typed")
PY
"$elsewhere/venv/bin/python" -m pytest -n 2 --dist worksteal
cd "$ROOT"
say "all checks passed"
