#!/usr/bin/env bash
# Calls `compile-stage run` with the action's inputs and hands on what came out. The inputs arrive as environment variables
# and become arguments without a shell ever reading them, so a model's name can't run a command.
#
# From the environment: MODEL_URI, POLICY, TARGETS, OUT, ARGS (see action.yml), GITHUB_OUTPUT, GITHUB_STEP_SUMMARY.
# Exits with compile-stage's own exit code.
set -uo pipefail

arguments=(run --policy "$POLICY" --out "$OUT")
# shellcheck disable=SC2153  # TARGETS is the action's input, targets the list made of it
read -r -a targets <<< "${TARGETS//[,$'\n']/ }"
for target in ${targets[@]+"${targets[@]}"}; do
    arguments+=(--target "$target")
done
while IFS= read -r argument; do
    [[ -z "$argument" ]] || arguments+=("$argument")
done <<< "$ARGS"

compile-stage "${arguments[@]}" -- "$MODEL_URI"
code=$?

if [[ -f "$OUT/report.md" ]]; then
    cat "$OUT/report.md" >> "$GITHUB_STEP_SUMMARY"
fi
echo "exit-code=$code" >> "$GITHUB_OUTPUT"
python - "$OUT/result.json" >> "$GITHUB_OUTPUT" <<'PYTHON'
import json
import sys
from pathlib import Path

path = Path(sys.argv[1])
result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"status": "error", "targets": []}
winners = {target["name"]: target["winner"] for target in result["targets"]}
published = {target["name"]: (target["receipt"] or {}).get("uri") for target in result["targets"]}
print(f"status={result['status']}")
print(f"winners={json.dumps(winners)}")
print(f"published={json.dumps(published)}")
print(f"result={path if path.exists() else ''}")
PYTHON

exit "$code"
