#!/usr/bin/env bash
# Two turns with nothing but curl. Start `make serve` first, then: bash examples/quickstart.sh
set -euo pipefail
url="${TURNKEEP_BASE_URL:-http://127.0.0.1:8000/v1}"

curl -sS --fail-with-body "$url/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "demo", "conversation_id": "quickstart-sh",
  "messages": [{"role": "user", "content": "Mara lives in Oslo."}]}'
echo

# The history goes back as it came; what the server has computed of it is not computed again (cached_tokens).
curl -sS --fail-with-body "$url/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "demo", "conversation_id": "quickstart-sh",
  "messages": [{"role": "user", "content": "Mara lives in Oslo."},
               {"role": "assistant", "content": "Noted. Mara lives in Oslo."},
               {"role": "user", "content": "Where does Mara live?"}]}'
echo
