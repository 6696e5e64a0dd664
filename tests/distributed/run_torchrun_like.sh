#!/usr/bin/env bash
# run_torchrun_like.sh RANKS PROGRAM ARGS...: starts the program RANKS times with the variables that
# torchrun sets, on this node. As torchrun's agent does, it holds MASTER_PORT itself, and ends the
# other ranks some time after one has failed. Exits with the first failing rank's code.
set -u
ranks=$1
shift
base=$((10000 + $$ % 1100 * 20))
helpers=()
trap '((${#helpers[@]})) && kill "${helpers[@]}" 2>/dev/null' EXIT

# Holds the port for as long as this script runs, if there is a Python to do it with.
if command -v python3 >/dev/null; then
  python3 -c "
import os, socket, time
held = socket.socket(); held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
held.bind(('127.0.0.1', $base)); held.listen()
parent = os.getppid()
while os.getppid() == parent: time.sleep(0.2)" >/dev/null 2>&1 &
  helpers+=($!)
fi

pids=()
for ((rank = 0; rank < ranks; ++rank)); do
  RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks \
    MASTER_ADDR=127.0.0.1 MASTER_PORT=$base TORCHELASTIC_RUN_ID=test-$$ "$@" &
  pids+=($!)
done

code=0
for ((left = ranks; left > 0; --left)); do
  wait -n "${pids[@]}" 2>/dev/null
  status=$?
  if ((status != 0 && code == 0)); then
    code=$status
    # Time for the others to say why they end; then what is stuck is killed.
    (sleep "${GRACE_SECONDS:-3}"; kill -KILL "${pids[@]}" 2>/dev/null) >/dev/null 2>&1 &
    helpers+=($!)
  fi
done
exit $code
