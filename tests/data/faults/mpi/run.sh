#!/bin/bash
# two machines of 8 GPUs, one torchrun each
export MASTER_ADDR=10.1.0.5
export MASTER_PORT=29500
mpirun -np 2 --map-by ppr:1:node --hostfile hosts --allow-run-as-root \
    -x PATH -x LD_LIBRARY_PATH -x MASTER_ADDR -x MASTER_PORT -x NCCL_SOCKET_IFNAME=eth0 \
    bash -c 'torchrun --nnodes 2 --nproc_per_node 8 --node_rank $OMPI_COMM_WORLD_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT src/train.py train.yaml'
