#!/usr/bin/env bash
# Runs the suite on several TensorFlows: scripts/test_versions.sh [VERSION ...]
#
# Without arguments on the oldest and the newest that are supported; for one between
# them give its number, as in scripts/test_versions.sh 2.18 2.20. Each has its own
# environment in .venv-tf-VERSION/, made from a Python that this TensorFlow has. All
# run; the exit code is 1 if one failed.
#   PYTEST_ARGUMENTS    given to pytest, such as "-x -k chain"
set -euo pipefail
# shellcheck source=scripts/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
show_help "$0" "${1-}"

OLDEST=2.16
NEWEST=2.21
(($#)) || set -- "$OLDEST" "$NEWEST"
read -r -a arguments <<<"${PYTEST_ARGUMENTS-}"
report=()
failed=0
for version in "$@"; do
  # TensorFlow before 2.20 has no wheels for Python 3.13.
  newest_python=$((${version#2.} < 20 ? 12 : 13))
  package=$(default_tensorflow)
  if MSG_VENV=$ROOT/.venv-tf-$version MSG_NEWEST_PYTHON=$newest_python \
    MSG_TENSORFLOW="${package%%>*}==$version.*" \
    bash "$ROOT/scripts/test.sh" "${arguments[@]}"; then
    verdict=passed
  else
    verdict=FAILED
    failed=1
  fi
  report+=("TensorFlow $version, $("$ROOT/.venv-tf-$version/bin/python" --version): $verdict")
done
printf '%s\n' "${report[@]}"
exit "$failed"
