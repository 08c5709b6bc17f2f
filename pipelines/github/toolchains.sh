#!/usr/bin/env bash
# Makes the toolchains that the caller names; one that was restored is left as it is.
#
# From the environment: TOOLCHAINS (see action.yml).
set -euo pipefail

read -r -a names <<< "${TOOLCHAINS//[,$'\n']/ }"
for name in ${names[@]+"${names[@]}"}; do
    compile-stage toolchain install -- "$name"
done
