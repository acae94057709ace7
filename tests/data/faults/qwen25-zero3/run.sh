#!/bin/bash
# two nodes of 8 GPUs; run this on the first one
export NNODES=2
export NODE_RANK=0
export NPROC_PER_NODE=8
export MASTER_ADDR=192.168.10.4
export MASTER_PORT=29500
export NCCL_SOCKET_IFNAME=eth0
FORCE_TORCHRUN=1 llamafactory-cli train full_sft.yaml
