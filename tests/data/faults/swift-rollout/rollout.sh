CUDA_VISIBLE_DEVICES=0 \
swift rollout \
    --model Qwen/Qwen2.5-7B-Instruct \
    --vllm_tensor_parallel_size 1 \
    --port 8000
