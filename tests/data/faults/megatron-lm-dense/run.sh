#!/bin/bash
# Qwen2.5-7B's shape on one node of 8 GPUs.
set -e
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_DEBUG=WARN
TP=4
CP=1

torchrun --standalone --nproc_per_node 8 pretrain_gpt.py \
    --use-mcore-models \
    --transformer-impl transformer_engine \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size 1 \
    --context-parallel-size $CP \
    --sequence-parallel \
    --num-layers 28 \
    --hidden-size 3584 \
    --ffn-hidden-size 18944 \
    --num-attention-heads 28 \
    --group-query-attention \
    --num-query-groups 4 \
    --seq-length 4096 \
    --max-position-embeddings 32768 \
    --position-embedding-type rope \
    --rotary-base 1000000 \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --add-qkv-bias \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --micro-batch-size 1 \
    --global-batch-size 64 \
    --train-iters 20000 \
    --lr 1e-4 \
    --min-lr 1e-5 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --bf16 \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --recompute-granularity selective \
    --attention-backend flash \
    --mock-data \
    --tokenizer-type NullTokenizer \
    --vocab-size 152064 \
    --split 99,1,0 \
    --log-interval 1 \
    --eval-interval 1000 \
    --eval-iters 1 \
    --save checkpoints/qwen \
    --load checkpoints/qwen \
    --save-interval 1000 \
    --ckpt-format torch_dist
