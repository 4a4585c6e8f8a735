#!/usr/bin/env bash
# Conversations by name: look at one, keep it, bring it up before its next turn, delete it from every tier.
#
#     examples/sessions.sh
set -euo pipefail
base=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
call() { # METHOD PATH [JSON]
  echo "> $1 $2" >&2
  curl --silent --show-error --fail-with-body --request "$1" "$base$2" \
    --header "authorization: Bearer ${OPENAI_API_KEY:-none}" --header 'content-type: application/json' ${3:+--data "$3"}
  echo
}
model=$(curl --silent --fail "$base/models" --header "authorization: Bearer ${OPENAI_API_KEY:-none}" |
  sed -E 's/.*"data":\[\{"id":"([^"]+)".*/\1/')

# The first turn makes the session. Its name is free: 1 to 128 letters, digits and . _ : -
call POST /chat/completions '{"model": "'"$model"'", "session_id": "holiday", "max_tokens": 20,
  "messages": [{"role": "user", "content": "Where shall we go this summer?"}]}'

# How many tokens, blocks and bytes of it lie in which tier, and when it expires.
call GET /sessions/holiday

# Never let it expire; or let it expire an hour after its last use.
call PATCH /sessions/holiday '{"pinned": true}'
call PATCH /sessions/holiday '{"pinned": false, "ttl_s": 3600}'

# Its next turn is near: bring its KV from disk to DRAM.
call POST /sessions/holiday/prefetch

# All of this key's sessions, a page at a time; `last_id` is the next page's `after`.
call GET '/sessions?limit=20'

# Answered when every tier has forgotten it.
call DELETE /sessions/holiday
