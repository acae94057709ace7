#!/bin/bash
accelerate launch --num_processes 8 --rdzv_conf "join_timeout=600" --role trainer --tee 3 src/sft.py --config config.yaml
accelerate launch --num_processes 8 run_clm.py \
    --model_name_or_path Qwen/Qwen2.5-1.5B \
    --tokenizer_name_or_path Qwen/Qwen2.5-1.5B \
    --dataset_dir /data/text \
    --do_train \
    --eval_steps 100
