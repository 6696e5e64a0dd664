#!/usr/bin/env bash
# Fine-tuning on several machines under Open MPI. Copy, edit the block below, run on one machine.
# The program and the files must stand at the same path on each machine.
set -euo pipefail

HOSTS="node1:8,node2:8"   # host:ranks, one rank a GPU
RANKS=16
MODEL=/data/models/base   # Hugging Face directory: bf16, or native block-FP8
DATA=/data/train.safetensors
OUTPUT=/data/runs/first

# A host network interface for Open MPI and NCCL, if the machines have several:
#   export OMPI_MCA_btl_tcp_if_include=eth0 NCCL_SOCKET_IFNAME=eth0
# Cores are not bound: each rank drives one GPU with a few host threads.
export OMPI_MCA_hwloc_base_binding_policy=none
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

# dp-shard × dp-replicate × tp = ranks. Sharding inside a machine and replicating across machines
# keeps the gathers on NVLink.
exec mpirun -np "$RANKS" --host "$HOSTS" -x OMP_NUM_THREADS \
  build/release/rowshard finetune \
  --model "$MODEL" --data "$DATA" --output-dir "$OUTPUT" --device cuda \
  --dp-shard 8 --dp-replicate 2 --tp 1 \
  --lora-r 16 --lora-alpha 32 --seq-len 2048 --packing true \
  --micro-batch-size 1 --grad-accum 4 --epochs 1 --lr 2e-4 --save-every 200 --resume auto "$@"
