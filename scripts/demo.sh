#!/usr/bin/env bash
# Trains a small ResNet on real images: scripts/demo.sh [arguments of demo.py]
#
# Stock gradients, "memory" and "speed", as a v1 graph and as a tf.function: one table
# of peaks, seconds and differences, and one picture of live bytes over the step.
#   --out FOLDER    where the picture goes (default: out/)
#   --steps N       training steps for each row (default: 8)
#   --batch N       images in a batch, at most 1797 (default: 128)
#   --blocks N      blocks in each of the three stages (default: 5)
#
# Makes a virtual environment in .venv/ first if there is none; see CONTRIBUTING.md
# for the variables PYTHON and MSG_VENV. Under three minutes on two cores after that.
set -euo pipefail
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
show_help "$0" "${1-}"

ensure_venv demo
exec "$VENV_PYTHON" "$ROOT/scripts/demo.py" "$@"
