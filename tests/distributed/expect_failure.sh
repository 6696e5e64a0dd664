#!/usr/bin/env bash
# expect_failure.sh SECONDS PATTERN COMMAND...: passes when the command fails within the time and
# prints a line that matches the extended regular expression.
set -u
seconds=$1 pattern=$2
shift 2
begin=$SECONDS
output=$(timeout --kill-after=5 "$seconds" "$@" 2>&1)
code=$?
echo "$output"
echo "-- exit code $code after $((SECONDS - begin)) s"
if ((code == 0)); then
  echo "FAILED: the command succeeded"
  exit 1
fi
if ((code == 124 || code == 137)); then
  echo "FAILED: still running after $seconds s"
  exit 1
fi
if ! grep -Eq -- "$pattern" <<<"$output"; then
  echo "FAILED: no line matches: $pattern"
  exit 1
fi
