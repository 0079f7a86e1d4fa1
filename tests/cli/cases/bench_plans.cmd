# Every test has a row, and beside it the plans that were drawn; a number that is none is refused.
sluice synth --shape tiny-qwen3moe --type Q4_K model.gguf >/dev/null
bench() {
    sluice bench -m model.gguf --device sim --vram 1M -t 1 -p 8 -n 3 -r 1 "$@"
    echo "exit $?"
}
bench --random-plans 4 -o json 2>/dev/null | grep -cE '"(random_best_ms|chosen_ms)":'
bench --random-plans 4 2>/dev/null | grep -c 'plans at random'
bench 2>/dev/null | grep -c 'plans at random'
bench --random-plans some 2>&1 >/dev/null | head -1
