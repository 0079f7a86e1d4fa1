# docs/options.md is what the tables say. To renew: sluice --dump-options-md > docs/options.md
sluice --dump-options-md | diff "$SOURCE/docs/options.md" -
