CUDA_VISIBLE_DEVICES=0 llamafactory-cli train qlora.yaml
