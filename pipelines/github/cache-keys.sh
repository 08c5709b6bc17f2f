#!/usr/bin/env bash
# Says under which keys this job's step cache and toolchains are kept. A policy that is wrong has no key: nothing is
# restored then, and the stage, which is called next, says what is wrong with it.
#
# From the environment: POLICY, TOOLCHAINS, ARGS (see action.yml), GITHUB_OUTPUT.
set -uo pipefail

# Of the arguments of `run`, those that say which policy it is.
asked=(--policy "$POLICY")
option=""
while IFS= read -r argument; do
    if [[ -n "$option" && -n "$argument" ]]; then
        asked+=("$option" "$argument")
        option=""
        continue
    fi
    case "$argument" in
        --set | --policy-root) option="$argument" ;;
        --set=* | --policy-root=*) asked+=("$argument") ;;
    esac
done <<< "$ARGS"

hand_on() {
    python -c '
import json, re, sys

prefix, suffix = sys.argv[1], "".join("-" + name for name in re.split(r"[\s,]+", sys.argv[2]) if name)
keys = json.load(sys.stdin)
print(prefix + "key=" + keys["key"] + suffix)
print(prefix + "path=" + keys["path"])
print("\n".join([f"{prefix}restore-keys<<END_OF_KEYS", *keys["restore_keys"], "END_OF_KEYS"]))
' "$1" "$2" >> "$GITHUB_OUTPUT"
}

if keys="$(compile-stage cache key "${asked[@]}" --json 2> /dev/null)"; then
    hand_on "" "" <<< "$keys"
fi
if keys="$(compile-stage cache key "${asked[@]}" --toolchains --json 2> /dev/null)"; then
    hand_on "toolchains-" "$TOOLCHAINS" <<< "$keys"
fi
