# The forms of asking for help and version; the texts of commands that change seldom.
sluice --version
sluice --help | head -3
sluice help info
sluice synth -h --shpae wrong
