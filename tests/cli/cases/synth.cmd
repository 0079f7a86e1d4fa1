# Shapes by name and by numbers; the same file at every thread count; environment variables; '--';
# '_' for '-'; nothing left behind by a failure.
sluice synth --list-shapes
sluice synth --shape tiny-qwen3 --type Q6_K --seed 5 -t 1 one.gguf
sluice synth --shape=tiny-qwen3 --type=q6_k -s 5 --threads 3 three.gguf
SLUICE_THREADS=2 sluice synth --shape TINY-QWEN3 --type Q6_K --seed 5 -- -two.gguf
cmp one.gguf three.gguf && cmp one.gguf ./-two.gguf && echo same
sluice synth --shape tiny-qwen3 --type Q6_K --seed 6 other.gguf
cmp -s one.gguf other.gguf || echo differs
rm ./-two.gguf three.gguf other.gguf
sluice synth --arch qwen2 --layers 1 --embd 96 --ff 64 --heads 3 --kv_heads 1 --head-dim 32 \
    --vocab 300 --ctx 128 --type Q4_K small.gguf
sluice info small.gguf
sluice synth --shape tiny-llama no_such_folder/out.gguf
echo "exit $?"
mkdir folder
sluice synth --shape tiny-llama folder
echo "exit $?"
ls
