#!/usr/bin/env bash
# Installs compile-stage into an environment of its own, so that it can't disturb what the caller's job has installed.
#
# From the environment: EXTRAS, VERSION (see action.yml), RUNNER_TEMP, GITHUB_ACTION_PATH, GITHUB_PATH.
set -euo pipefail

EXTRAS="${EXTRAS//[[:space:]]/}"
if [[ ! "$EXTRAS" =~ ^[A-Za-z0-9_,-]*$ || ! "$VERSION" =~ ^[A-Za-z0-9.+!]*$ ]]; then
    echo "::error::extras must be names separated by commas, and version a version, not '$EXTRAS' and '$VERSION'"
    exit 2
fi

environment="$RUNNER_TEMP/compile-stage"
python -m venv "$environment"

if [[ -n "$VERSION" ]]; then
    what="compile-stage${EXTRAS:+[$EXTRAS]}==$VERSION"
else
    what="$(realpath "$GITHUB_ACTION_PATH/../..")${EXTRAS:+[$EXTRAS]}"
fi
"$environment/bin/python" -m pip install --disable-pip-version-check --quiet "$what"
echo "$environment/bin" >> "$GITHUB_PATH"
