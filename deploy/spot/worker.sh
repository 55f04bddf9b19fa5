#!/usr/bin/env bash
# A decode worker on a host that costs money by the minute: it fetches the inputs, decodes, and ends when the run is
# complete. SIGTERM ends it sooner: what it holds goes back to the queue. Of a kill without notice, its leases expire.
#
#   CONFIG: the run's configuration, the same for all its roles. REDIS_URL: its broker.
#   INPUTS: s3://…, gs://… or a path whose contents are copied to INPUTS_AT (/inputs), where `model.path` says.
set -euo pipefail
: "${CONFIG:?}" "${REDIS_URL:?}"

if [ -n "${INPUTS:-}" ]; then
  python - "$INPUTS" "${INPUTS_AT:-/inputs}" <<'PY'
import sys
from fsspec.core import url_to_fs

source, place = sys.argv[1:]
files, path = url_to_fs(source)
files.get(path.rstrip("/") + "/", place.rstrip("/") + "/", recursive=True)
PY
fi

sluice worker -c "$CONFIG" &
worker=$!
trap 'kill -TERM "$worker" 2>/dev/null || true' TERM INT

is_complete() { # a broker that doesn't answer says nothing
  sluice status -c "$CONFIG" --json 2>/dev/null | python -c 'import json, sys; sys.exit(json.load(sys.stdin)["state"] not in ("finished", "stopped"))' 2>/dev/null
}

(
  pause=
  trap 'kill $pause 2>/dev/null; exit' TERM # a pause must not outlive this
  until is_complete; do
    sleep "${LOOK_EVERY_S:-60}" &
    pause=$!
    wait "$pause"
  done
  kill -TERM "$worker"
) &
watch=$!
code=0
wait "$worker" || code=$?
while kill -0 "$worker" 2>/dev/null; do # the signal ended the wait, and not the worker
  code=0
  wait "$worker" || code=$?
done
kill "$watch" 2>/dev/null || true
case $code in 0 | 143) exit 0 ;; *) exit "$code" ;; esac # 143: asked to end
