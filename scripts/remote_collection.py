"""Small checkpoints of models with code of their own, as public repositories have it.

    python scripts/remote_collection.py fill CLONES OUT [NAME ...]
    PYTHONPATH=<transformers of their year> python scripts/remote_collection.py weights OUT NAME ...
    PYTHONPATH=<transformers of their year> python scripts/remote_collection.py judge OUT NAME LOGITS
    python scripts/remote_collection.py check OUT [NAME ...]

`remote_collection.yaml` names repository, path and commit of each. CLONES is a folder with a git
repository `<owner>+<name>` of each, which the reader has cloned: nothing is fetched here, and none
of the files become part of this project. `fill` writes code and a small config; `weights` writes
random weights, from the repository's own class, with the transformers that it was written for;
`judge` writes the logits of that class for the tokens in LOGITS (`ids`) beside them (`logits`),
those of each token by the text up to it where the table says `by_prefix`. Where it says
`loaded_alone`, the class sets first values of other shapes than its checkpoints have; `kernels_of`
names a package for whose kernels the class casts to half precision, which is left out in float32, or
asserts that it is that, on a GPU, which is not asked. `modules` names those of a package that become
files of one folder, with what they import of it but for what is below `installed`.

`check` does all of it for models that are filled: it runs the whole command, generates with the
model file that came of it, and has the repository's class judge the texts. It prints a line a
model: onboarded, refused and why, WRONG, or not judged, where that class itself does not run; "not
as expected" where the table says otherwise, and then the exit code is 1. OLD_TRANSFORMERS is a
folder with the transformers of the years, a folder each (`pip install --target
$OLD_TRANSFORMERS/4.33 transformers==4.33.3`), and of what models need besides (einops, ...) in
`common`, plain code in place of packages whose kernels need a GPU (fla's `chunk_simple_gla`,
mamba_ssm's `rmsnorm_fn`); what `kernels_of` names has plain code in a folder of its name. Where
there is no folder of a year, the installed one is taken.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # run as a file, it finds no neighbour
    from scripts.collection.commands import main

    main()
