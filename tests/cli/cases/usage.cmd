# Wrong command lines: one line each, exit code 2.
exec 2>&1
try() {
    echo "\$ $*"
    "$@"
    echo "exit $?"
}
try sluice
try sluice inof
try sluice frobnicate
try sluice help frobnicate
try sluice synth --shpae tiny-llama out.gguf
try sluice synth --frobnicate
try sluice synth --temp 1
try sluice synth -z
try sluice synth --shape
try sluice synth --list-shapes=yes
try sluice synth --threads many out.gguf
try sluice synth --threads 2.5 out.gguf
try sluice synth --threads=-1 out.gguf
try sluice synth --threads 99999999999999999999 out.gguf
try sluice synth --type Q9 out.gguf
try sluice synth --arch mamba out.gguf
try sluice synth out.gguf
try sluice synth --shape tiny-lama out.gguf
try sluice synth --shape nothing out.gguf
try sluice synth --shape tiny-llama
try sluice synth --shape tiny-llama a.gguf b.gguf
try sluice synth --shape tiny-llama --arch llama out.gguf
try sluice synth --arch llama --head-dim 48 out.gguf
try sluice synth --arch llama --kv-heads 3 out.gguf
try sluice synth --arch llama --vocab 256 out.gguf
try env SLUICE_THREADS=x sluice synth --shape tiny-llama out.gguf
try env SLUICE_VERBOSE=yes sluice synth --shape tiny-llama out.gguf
try sluice run -p hello
try sluice run -m x.gguf --logit-bias 12
try sluice run -m x.gguf --logit-bias hello+1
try sluice run -m x.gguf --vram 5X
try sluice run -m x.gguf --vram 120%
try sluice run -m x.gguf --device tpu
try sluice run -m x.gguf --strategy best
try sluice run -m x.gguf --top-p 1.5
try sluice run -m x.gguf --temp warm
try sluice run -m absent.gguf --device cpu
ls
