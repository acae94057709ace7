#!/bin/bash
set -e
NAME=$1
CONFIG=${2:?name a configuration}
TEMPLATE=$3
FORCE_TORCHRUN=1 llamafactory-cli train train.yaml model_name_or_path=Qwen/Qwen2.5-7B-Instruct \
    dataset="${NAME}_train" output_dir="saves/$NAME"
torchrun --nproc_per_node 8 src/train.py "$CONFIG" model_name_or_path=Qwen/Qwen2.5-7B-Instruct \
    dataset="${NAME}_train" output_dir="saves/$NAME-2" per_device_train_batch_size=2
python scripts/vllm_infer.py \
    --model_name_or_path "saves/$NAME" \
    --dataset "${NAME}_test" \
    --template "$TEMPLATE" \
    --cutoff_len 4096 \
    --save_name results.jsonl
