#!/usr/bin/env bash
# Bad input to the program: exit code 2, one clear line on stderr, nothing on stdout, nothing
# written. And what must work without a model: help, version, skips.
#   tests/cli/run.sh PROGRAM MPIRUN
set -uo pipefail

program="$(realpath "$1")" mpirun="$2"
docs="$(realpath "$(dirname "$0")/../../docs/program.md")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
checks=0 failures=0

fail() {
  printf 'FAILED: %s\n' "$*"
  failures=$((failures + 1))
}

# run COMMAND...: sets status, out, err.
run() {
  checks=$((checks + 1))
  "$@" >"$work/.out" 2>"$work/.err"
  status=$?
  out="$(cat "$work/.out")" err="$(cat "$work/.err")"
}

# What there is, with sizes: what a refused command must leave as it was.
listing() { find . -mindepth 1 ! -name .out ! -name .err -printf '%p %s\n' | sort; }

# refused WORDS ARGS...: the program refuses ARGS, and its line holds WORDS.
refused() {
  local words="$1" before
  shift
  before="$(listing)"
  run "$program" "$@"
  [ "$status" -eq 2 ] || fail "exit code $status of: $* ($err)"
  [ -z "$out" ] || fail "stdout of: $*: $out"
  [ "$(wc -l <"$work/.err")" -eq 1 ] || fail "not one line from: $*: $err"
  [ "${err#rowshard: }" != "$err" ] || fail "no 'rowshard: ' before: $err"
  case "$err" in
    *"$words"*) ;;
    *) fail "'$words' is not in: $err" ;;
  esac
  [ "$before" = "$(listing)" ] || fail "files changed by: $*"
}

# shows WORDS ARGS...: exit code 0, stdout holds WORDS.
shows() {
  local words="$1"
  shift
  run "$program" "$@"
  [ "$status" -eq 0 ] || fail "exit code $status of: $* ($err)"
  case "$out" in
    *"$words"*) ;;
    *) fail "'$words' is not in the output of: $*" ;;
  esac
}

# The smallest config.json of a model that exists; $1: directory, $2: sed program that spoils it.
config() {
  mkdir -p "$1"
  sed "$2" >"$1/config.json" <<'JSON'
{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_size": 64,
  "intermediate_size": 128,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "vocab_size": 256,
  "max_position_embeddings": 128,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0,
  "hidden_act": "silu",
  "tie_word_embeddings": true,
  "torch_dtype": "bfloat16"
}
JSON
}

shows "usage: rowshard COMMAND" --help
shows "devices: host" --version
for command in finetune plan quantize merge evaluate generate validate bench inspect; do
  shows "usage: rowshard $command" "$command" --help
done
shows "default: 0.0002" finetune --lr 1 --help

# docs/program.md has every option with its default, and no other.
options() {
  # shellcheck disable=SC2086  # "bench step" is two words
  "$program" $1 --help | awk '
    function flush() { if (row != "") print row; row = "" }
    /^  --/ { flush(); row = $0; next }
    row != "" && /^          / { sub(/ *$/, "", row); sub(/^ +/, " "); row = row $0; next }
    { flush() }
    END { flush() }' | grep -vE '^  --(help|config) '
}
for command in finetune plan quantize merge evaluate generate validate bench "bench stack" "bench step" inspect; do
  while read -r row; do
    checks=$((checks + 1))
    name="${row%% *}" default=""
    case "$row" in *"(default: "*) default="${row##*(default: }" default="${default%)}" ;; esac
    grep -F -- "| \`$name" "$docs" | grep -qF -- "\` | $default |" ||
      fail "docs/program.md: no row of $command $name with the default '$default'"
  done < <(options "$command")
done
everything="$(for command in finetune plan quantize merge evaluate generate validate bench "bench stack" "bench step" \
  inspect; do
  options "$command"
done)"
while read -r name; do
  grep -qE "^  $name( |\$)" <<<"$everything" || fail "docs/program.md: $name is no option"
done < <(sed -nE 's/^\| `(--[a-z-]+).*/\1/p' "$docs" | sort -u)

refused "no command finetun; did you mean finetune?" finetun
refused "no command frobnicate; rowshard --help" frobnicate

job=(finetune --model model --data data.safetensors --output-dir out)
refused "--model is missing" finetune
refused "--data is missing" finetune --model model
refused "--output-dir is missing" finetune --model model --data data.safetensors
refused "no option --max-stps; did you mean --max-steps?" "${job[@]}" --max-stps 3
refused "no option --quux; --help lists them" "${job[@]}" --quux 3
# A prefix is not an option.
refused "no option --warmup" "${job[@]}" --warmup 3
refused "--lr needs a value" "${job[@]}" --lr
refused "--lr is given more than once" "${job[@]}" --lr 1 --lr 2
refused "unexpected argument 'stray'" "${job[@]}" stray
refused "--dry-run takes no value" "${job[@]}" --dry-run=true
refused "--recipe blok: use one of block, mx, bf16" "${job[@]}" --recipe blok
refused "--columnwise gone: use one of release, resident, direct, auto" "${job[@]}" --columnwise gone
refused "--lr-schedule cos: use one of cosine" "${job[@]}" --lr-schedule cos
refused "--recompute all: use one of none, block" "${job[@]}" --recompute all
refused "--device gpu: use one of auto, cuda, host" "${job[@]}" --device gpu
refused "--transport mpi: use one of peer, nccl, staged" "${job[@]}" --transport mpi
refused "--reshard-after-forward yes: use true, false, resident" \
  "${job[@]}" --reshard-after-forward yes
refused "--packing 1: use true or false" "${job[@]}" --packing 1
refused "--lr abc: must be a number" "${job[@]}" --lr abc
refused "--lr nan: must be a finite number" "${job[@]}" --lr nan
refused "--lr -1: must be above 0" "${job[@]}" --lr -1
refused "--max-steps 1.5: must be a whole number" "${job[@]}" --max-steps 1.5
refused "--max-steps 99999999999999999999: must be" "${job[@]}" --max-steps 99999999999999999999
refused "--seed -1: must be a whole number of at least 0" "${job[@]}" --seed -1
refused "--max-steps and --epochs exclude each other" "${job[@]}" --max-steps 3 --epochs 2
refused "--prefetch 9: must be 0 to 8" "${job[@]}" --prefetch 9
refused "--clip-norm -1: must be at least 0" "${job[@]}" --clip-norm -1
refused "--micro-batch-size 0: must be at least 1" "${job[@]}" --micro-batch-size 0
refused "--eval-every 5 needs --eval-data" "${job[@]}" --eval-every 5
refused "--target-modules" "${job[@]}" --target-modules q_proj,,v_proj
refused "exactly one of --prompt TEXT and --prompt-ids" generate --model model
refused "exclude each other" generate --model model --prompt a --prompt-ids 1
refused "--prompt-ids x: must be whole numbers" generate --model model --prompt-ids 1,x

refused "--output-dir is missing" quantize --model model
refused "model: no such" quantize --model model --output-dir out
refused "--adapter is missing" merge --model model --output-dir out
refused "model: no such" merge --model model --adapter adapter --output-dir out
refused "--max-shard-bytes 0" merge --model m --adapter a --output-dir out --max-shard-bytes 0
refused "PATH is missing" inspect --json
refused "one PATH only" inspect a b
refused "nowhere" inspect nowhere
refused "--model is missing" plan
refused "MODE is missing" validate
refused "validate fsdp: use one of single, fsdp2-reshard" validate fsdp
refused "--seq-len 1023 cannot be split over --tp 2 ranks: use 1022 or 1024" \
  "${job[@]}" --tp 2 --seq-len 1023
refused "--tp 2 with --recipe mx is not in this version: use --recipe block" \
  "${job[@]}" --tp 2 --recipe mx
refused "--tp-sums half: use one of bf16, fp32" "${job[@]}" --tp-sums half
refused "--tokens 0: must be at least 1" bench step --tokens 0
refused "model: no such" plan --model model

# --config: the same names; an error names the file; the command line wins.
printf '# a comment\nmodel = model\ndata = data.safetensors\noutput-dir = out\nlr = fast\n' >job.conf
refused "--lr fast: must be a number" finetune --config job.conf
refused "model: no such directory" finetune --config job.conf --lr 1
refused "--config missing.conf: cannot read" finetune --config missing.conf
printf 'max-stps = 3\n' >typo.conf
refused "typo.conf: there is no option --max-stps; did you mean --max-steps?" \
  finetune --config typo.conf
printf 'max-steps\n' >syntax.conf
refused "syntax.conf: " finetune --config syntax.conf
printf 'epochs = 2\nmodel = model\ndata = d\noutput-dir = out\n' >epochs.conf
refused "model: no such directory" finetune --config epochs.conf --max-steps 3
printf 'epochs = 2\nmax-steps = 3\n' >both.conf
refused "both.conf: --max-steps and --epochs exclude" finetune --config both.conf
printf 'dry-run = maybe\n' >flag.conf
refused "use true or false" finetune --config flag.conf

# Models that are none, on the host so that every machine takes the same way.
host=(--data data.safetensors --output-dir out --device host)
refused "model: no such directory" finetune --model model "${host[@]}"
mkdir empty
refused "config.json" finetune --model empty "${host[@]}"
config garbled 's/"hidden_size"/hidden_size/'
refused "config.json" finetune --model garbled "${host[@]}"
config keyless '/"hidden_size"/d'
refused "hidden_size" finetune --model keyless "${host[@]}"
config stranger 's/"llama"/"mamba"/'
refused "mamba" finetune --model stranger "${host[@]}"
config weightless ''
refused "safetensors" finetune --model weightless "${host[@]}"
config truncated ''
printf '\377\0\0\0\0\0\0\0{"model.embed_tokens.weight"' >truncated/model.safetensors
refused "model.safetensors" finetune --model truncated "${host[@]}"

run "$program" bench collectives --device host
[ "$status" -eq 77 ] || fail "bench collectives on one rank: exit code $status, not 77"
refused "WHAT is missing" bench
refused "bench nothing: use one of collectives, kernels, gemm" bench nothing
refused "--features 100: must be a multiple of 16" bench stack --features 100
refused "the host has no graphs" bench stack --device host --graph true
run "$program" bench stack --device host --layers 2 --features 128 --tokens 128 --repeats 1 \
  --steps 1 --json stack.json
[ "$status" -eq 0 ] && grep -q '"codes_bytes": 32768' stack.json ||
  fail "bench stack: exit code $status: $err"

# All ranks meet the same error: one line of the program, exit code 2.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
for arguments in "--lr abc" "--lr 1"; do # before the ranks meet, and after
  # shellcheck disable=SC2086  # two words are meant
  run "$mpirun" -np 2 "$program" finetune --model model "${host[@]}" $arguments
  [ "$status" -eq 2 ] || fail "exit code $status of two ranks with $arguments"
  [ "$(grep -c '^rowshard: ' "$work/.err")" -eq 1 ] || fail "not one line of two ranks: $err"
done
[ ! -e out ] || fail "two ranks left an output directory"

printf '%d checks, %d failed\n' "$checks" "$failures"
[ "$failures" -eq 0 ]
