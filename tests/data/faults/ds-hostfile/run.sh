#!/bin/bash
# two machines of 8 GPUs; run on the first, which reaches the other over ssh
export NCCL_SOCKET_IFNAME=eth0
deepspeed --hostfile hostfile --num_nodes 2 --num_gpus 8 \
  --master_addr 192.168.3.100 --master_port 29500 \
  src/train.py \
  --deepspeed ds_z2.json \
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
  --max_steps 260 \
  --warmup_steps 20 \
  --lr_scheduler_type linear \
  --logging_steps 10 \
  --save_steps 130 \
  --bf16 True
