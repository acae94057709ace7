#!/bin/bash
workdir=$(cd $(dirname $0); pwd)
WORLD_SIZE=8
MODEL_NAME="Qwen/Qwen2.5-7B-Instruct"
export DISABLE_VERSION_CHECK=1

torchrun --nproc_per_node=$WORLD_SIZE $workdir/run_train.py \
    --use_mca \
    --do_train \
    --stage=sft \
    --finetuning_type=full \
    --dataset_dir=$workdir/data \
    --dataset=identity \
    --preprocessing_num_workers=8 \
    --cutoff_len=4096 \
    --template=qwen \
    --model_name_or_path=$MODEL_NAME \
    --output_dir=./tmp \
    --per_device_train_batch_size=1 \
    --gradient_accumulation_steps=8 \
    --num_train_epochs=2 \
    --learning_rate=1e-5 \
    --logging_steps=1 \
    --save_steps=100 \
    --lr_scheduler_type=cosine \
    --bf16 \
    --tensor_model_parallel_size=2 \
    --sequence_parallel \
    --pipeline_model_parallel_size=1 \
    --use_distributed_optimizer \
    --bias_activation_fusion \
    --apply_rope_fusion \
    --overlap_param_gather \
    --overlap_grad_reduce
