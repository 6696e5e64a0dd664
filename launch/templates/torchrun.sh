#!/usr/bin/env bash
# Fine-tuning under torchrun, for clusters whose jobs are started that way. torchrun starts Python
# unless told otherwise, hence --no-python; the program itself needs neither Python nor torch.
# Run it on each machine, with the same MASTER_ADDR and its own NODE_RANK.
set -euo pipefail

NODES="${NODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
GPUS="${GPUS:-8}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"
MODEL=/data/models/base   # Hugging Face directory: bf16, or native block-FP8
DATA=/data/train.safetensors
OUTPUT=/data/runs/first

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

exec torchrun --no-python --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  build/release/rowshard finetune \
  --model "$MODEL" --data "$DATA" --output-dir "$OUTPUT" --device cuda \
  --dp-shard "$GPUS" --dp-replicate "$NODES" --tp 1 \
  --lora-r 16 --lora-alpha 32 --seq-len 2048 --packing true \
  --micro-batch-size 1 --grad-accum 4 --epochs 1 --lr 2e-4 --save-every 200 --resume auto "$@"
