#!/bin/bash
export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
export NNODES=2
export NODE_RANK=1
export MASTER_ADDR=10.20.0.11
export MASTER_PORT=29500
export NPROC_PER_NODE=8
megatron sft \
    --model Qwen/Qwen3-30B-A3B-Instruct-2507 \
    --tuner_type full \
    --dataset 'swift/self-cognition#500' \
    --tensor_model_parallel_size 2 \
    --pipeline_model_parallel_size 2 \
    --expert_model_parallel_size 4 \
    --sequence_parallel true \
    --moe_permute_fusion true \
    --moe_grouped_gemm true \
    --moe_aux_loss_coeff 1e-3 \
    --micro_batch_size 1 \
    --global_batch_size 16 \
    --packing true \
    --max_length 8192 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --num_train_epochs 1 \
    --lr 1e-5 \
    --lr_warmup_fraction 0.05 \
    --min_lr 1e-6 \
    --output_dir megatron_output \
    --save_steps 200 \
    --attention_backend flash
