#!/bin/bash
export USE_MCA=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_SOCKET_IFNAME=eth0
torchrun --nproc_per_node 8 --nnodes 2 --node_rank 0 \
    --master_addr 10.20.0.11 --master_port 29500 \
    src/train.py train.yaml
