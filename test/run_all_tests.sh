#!/usr/bin/env bash
# Runs the suite, then the comparison: ./run_all_tests.sh [arguments]
#
# Peak memory and step time of ResNets, transformers and chains against their number of
# layers, with stock gradients, "memory" and "speed"; and the deepest ResNet that trains
# in the memory that stock needs for a small one. Prints a table and writes a CSV file
# and two pictures.
#   --quick        small networks: two to three minutes on two cores, after the suite
#   --no-suite     leaves out the suite
#   --out FOLDER   where the results go (default: out/ of the checkout)
# All other arguments go to scripts/compare_depths.py, which explains them on --help.
#
# Makes a virtual environment in .venv/ first if there is none; see CONTRIBUTING.md
# for the variables PYTHON and MSG_VENV.
set -euo pipefail
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_venv.sh"
show_help "$0" "${1-}"

suite=yes
arguments=()
out=("--out" "$ROOT/out")
for argument in "$@"; do
  case $argument in
    --no-suite) suite=no ;;
    --out | --out=*) out=() arguments+=("$argument") ;;
    *) arguments+=("$argument") ;;
  esac
done

ensure_venv test
# A wrong argument is told now and not after the suite.
PYTHONPATH="$ROOT/scripts" "$VENV_PYTHON" -c \
  'import compare_depths; compare_depths.parse()' ${arguments[@]+"${arguments[@]}"}
if [[ $suite == yes ]]; then
  say "the suite"
  (cd "$ROOT" && "$VENV_PYTHON" -m pytest -n 2 --dist worksteal)
fi
say "the comparison"
exec "$VENV_PYTHON" "$ROOT/scripts/compare_depths.py" ${out[@]+"${out[@]}"} \
  ${arguments[@]+"${arguments[@]}"}
