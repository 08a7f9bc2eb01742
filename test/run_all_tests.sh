#!/usr/bin/env bash
# Runs the suite, then the comparison: ./run_all_tests.sh [arguments]
#
# Peak memory and step time of ResNets, transformers and chains against their number of
# layers, with stock gradients, "memory" and "speed"; and the deepest ResNet that trains
# in the memory that stock needs for a small one. Prints a table and writes a CSV file
# and two pictures.
#   --quick         small networks: two to three minutes on two cores, after the suite
#   --no-suite      leaves out the suite
#   --out FOLDER    where the results go (default: out/ of the checkout)
#   --batch N       images in a batch of the ResNets
#   --blocks A,B    sizes of the ResNets
#   --depths A,B    layers of the transformers
#   --lengths A,B   lengths of the chains
#   --rounds N      timed steps of each
#   --reference N   blocks of the ResNet of which stock says what memory there is
#   --no-deepest    no search for the deepest
# All but --no-suite go to scripts/compare_depths.py, which says more on --help.
#
# Makes a virtual environment in .venv/ first if there is none; see CONTRIBUTING.md
# for the variables PYTHON and MSG_VENV.
set -euo pipefail
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_venv.sh"
for argument in "$@"; do
  show_help "$0" "$argument"
done

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

# A wrong argument is told now, not after what is installed and the suite.
python=$(any_python)
PYTHONPATH="$ROOT/scripts" "$python" -c \
  'import compare_depths; compare_depths.parse(with_suite=True)' "$@"
ensure_venv test
if [[ $suite == yes ]]; then
  say "the suite"
  (cd "$ROOT" && "$VENV_PYTHON" -m pytest -n 2 --dist worksteal)
fi
say "the comparison"
exec "$VENV_PYTHON" "$ROOT/scripts/compare_depths.py" ${out[@]+"${out[@]}"} \
  ${arguments[@]+"${arguments[@]}"}
