#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1,2,3
deepspeed --include localhost:0,1,2,3 --master_port 29500 src/train.py \
  --deepspeed ds_z3.json \
  --stage sft \
  --do_train True \
  --model_name_or_path Qwen/Qwen2.5-7B-Instruct \
  --finetuning_type full \
  --dataset alpaca_en_demo \
  --template qwen \
  --cutoff_len 2048 \
  --output_dir saves/qwen2.5-7b/full \
  --per_device_train_batch_size 1 \
  --gradient_accumulation_steps 4 \
  --learning_rate 1e-5 \
  --num_train_epochs 1.0 \
  --lr_scheduler_type cosine \
  --logging_steps 10 \
  --save_steps 500 \
  --bf16 True
