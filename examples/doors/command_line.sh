# "$@": --set training.steps=... and the like
set -e
quietgrad train command_line.toml "$@"
quietgrad predict command_line public.csv --output command_line/predictions.csv
