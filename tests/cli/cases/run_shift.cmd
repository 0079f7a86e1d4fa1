# A context that is full ends the text, unless it is shifted; what is kept must leave room.
sluice synth --shape tiny-llama --type F16 tiny.gguf >/dev/null
run() {
    sluice run -m tiny.gguf --device cpu -c 48 -n 200 --temp 0 -p 'one two three' \
        -l 316-1000 -l 317-1000 -l 318-1000 -l 319-1000 --stats "$@" >text 2>said
    echo "exit $?"
    grep -E 'context|^generation' said | sed 's/ in .*//'
}
run
run --context-shift
run --context-shift --keep 0
sluice run -m tiny.gguf --device cpu -c 12 -n 200 --temp 0 -p 'one two three' --context-shift \
    2>&1 >text | grep context
