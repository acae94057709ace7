#!/bin/bash
export NNODES=$BT_GROUP_SIZE
export NODE_RANK=$BT_NODE_RANK
export MASTER_ADDR=$BT_LEADER_ADDR
export MASTER_PORT=29500
export NPROC_PER_NODE=$BT_NUM_GPUS
export NCCL_DEBUG=WARN
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-en#2000' \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --attn_impl flash_attn \
    --max_length 4096 \
    --deepspeed zero3 \
    --output_dir "$BT_CHECKPOINT_DIR/sft"
