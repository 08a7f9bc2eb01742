#!/usr/bin/env bash
# Trains on two workers of this machine: scripts/train_two_workers.sh [arguments]
#
# Two processes, a MultiWorkerMirroredStrategy over the loopback, synchronised batch
# norm; fit and a loop by hand, with stock gradients and with enable(). Prints one table
# of peaks and of differences from stock, and fails if a peak does not fall or a number
# differs. Leaves no process behind, whatever happens.
#   --out FOLDER    keeps weights, figures and logs there (default: a temporary folder)
#   --ways LIST     "fit", "loop" or both, with a comma between them (default: both)
#   --steps N       training steps for each row (default: 3)
#   --batch N       rows for each worker (default: 1024)
#   --layers N      dense layers (default: 10)
#   --width N       their width (default: 256)
#   --timeout N     seconds after which both processes are stopped (default: 300)
#
# Makes a virtual environment in .venv/ first if there is none; see CONTRIBUTING.md
# for the variables PYTHON and MSG_VENV. Under a minute on two cores after that.
set -euo pipefail
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
show_help "$0" "${1-}"

ensure_venv demo
exec "$VENV_PYTHON" "$ROOT/scripts/train_two_workers.py" "$@"
