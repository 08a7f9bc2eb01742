#!/usr/bin/env bash
# Runs the test suite: scripts/test.sh [arguments of pytest]
#
# Leaves out what is marked slow (whole architectures, several workers, documents as
# programs): `scripts/test.sh -m ""` runs it, too, and scripts/check_all.sh always does.
# Makes a virtual environment in .venv/ first if there is none; see CONTRIBUTING.md
# for the variables PYTHON and MSG_VENV. Five minutes at most on two cores.
set -euo pipefail
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
show_help "$0" "${1-}"

ensure_venv test
cd "$ROOT"
# Two processes: half of the suite waits for tracing, which one core does.
exec "$VENV_PYTHON" -m pytest -n 2 --dist worksteal -m "not slow" "$@"
