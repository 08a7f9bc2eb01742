# shellcheck shell=bash
# Sourced by the scripts beside it: one virtual environment for all of them.
#
#   show_help "$0" "${1-}"    prints the script's head comment on --help and ends
#   any_python                prints a Python for what needs nothing installed
#   ensure_venv EXTRA         makes the environment with that extra of setup.py, or
#                             takes it as it is when it is complete; sets VENV_PYTHON
#
#   PYTHON           the interpreter from which the environment is made
#   MSG_VENV         the folder of the environment (default: .venv of the checkout)
#   MSG_TENSORFLOW   what pip installs where no TensorFlow can be imported

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL-2}

say() { printf '==> %s\n' "$*" >&2; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

show_help() {
  [[ ${2-} == -h || ${2-} == --help ]] || return 0
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"
  exit 0
}

# Succeeds when Python $1 can make an environment and is at most Python 3.$2.
python_fits() {
  "$1" -c "import ensurepip, sys, venv
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $2))" >/dev/null 2>&1
}

# Prints an interpreter that is at most Python 3.$1, the last that TensorFlow has.
find_python() {
  local candidate
  if [[ -n ${PYTHON-} ]]; then
    python_fits "$PYTHON" 99 ||
      die "PYTHON=$PYTHON is no Python 3.10 or newer with the modules venv and ensurepip"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if python_fits "$candidate" "$1"; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.10 to 3.$1 with the modules venv and ensurepip was found" \
    "(Debian and Ubuntu: install python3-venv). Set PYTHON to one."
}

# That of the environment or, where there is none yet, the one it would be made from.
any_python() {
  local python=${MSG_VENV:-$ROOT/.venv}/bin/python
  if [[ -x $python ]]; then echo "$python"; else newest_python; fi
}

newest_python() { find_python "${MSG_NEWEST_PYTHON-13}"; }

default_tensorflow() {
  case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) echo 'tensorflow-cpu>=2.16' ;;
    *) echo 'tensorflow>=2.16' ;;
  esac
}

# Makes an empty environment in $1, or keeps the one that is there.
make_venv() {
  [[ -x $1/bin/python ]] && "$1/bin/python" -c 'import pip' 2>/dev/null && return
  [[ ! -e $1 || -e $1/pyvenv.cfg ]] || die "$1 exists and is no virtual environment"
  local python
  python=$(newest_python)
  say "making a virtual environment in $1 ($("$python" --version))"
  "$python" -m venv --clear "$1"
}

# pip install $2... into environment $1, and TensorFlow where there is none.
install_with_tensorflow() {
  local venv=$1
  shift
  if ! "$venv/bin/python" -c 'import tensorflow' >/dev/null 2>&1; then
    set -- "$@" "${MSG_TENSORFLOW:-$(default_tensorflow)}"
  fi
  say "installing $*"
  "$venv/bin/python" -m pip install "$@"
}

# Keras 2, for the tests of it: without what it depends on, which would bring a second
# TensorFlow. Where it cannot be had these tests are left out.
install_keras_2() {
  local version
  version=$("$1/bin/python" -c \
    'import tensorflow as tf; print(".".join(tf.__version__.split(".")[:2]))')
  "$1/bin/python" -m pip install --no-deps "tf_keras==$version.*" ||
    say "going on without tf_keras $version"
}

ensure_venv() {
  local extra=$1 venv=${MSG_VENV:-$ROOT/.venv} stamp expected
  stamp=$venv/.complete-$extra
  expected="$ROOT $(cksum <"$ROOT/setup.py") ${MSG_TENSORFLOW-}"
  VENV_PYTHON=$venv/bin/python
  if [[ -x $VENV_PYTHON && -e $stamp && $(<"$stamp") == "$expected" ]]; then
    return
  fi
  make_venv "$venv"
  install_with_tensorflow "$venv" --editable "${ROOT}[$extra]"
  case $extra in test | dev) install_keras_2 "$venv" ;; esac
  echo "$expected" >"$stamp"
}
