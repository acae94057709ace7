#!/usr/bin/env bash
set -euo pipefail

gpus=4
export CUDA_VISIBLE_DEVICES=0,1,2,3
export NPROC_PER_NODE=$gpus

args=(
  --rlhf_type kto
  --model Qwen/Qwen3-8B
  --tuner_type lora
  --quant_method bnb
  --quant_bits 4
  --bnb_4bit_compute_dtype bfloat16
  --bnb_4bit_quant_type nf4
  --dataset 'AI-ModelScope/ultrafeedback-binarized-preferences-cleaned-kto#10000'
  --torch_dtype bfloat16
  --num_train_epochs 1
  --per_device_train_batch_size 2
  --gradient_accumulation_steps 4
  --learning_rate 1e-4
  --lora_rank 16
  --lora_alpha 32
  --lora_dropout 0.05
  --target_modules all-linear
  --max_length 2048
  --save_steps 100
  --save_total_limit 2
  --logging_steps 5
  --output_dir "output/kto"
  --warmup_ratio 0.05
)
swift rlhf "${args[@]}"
