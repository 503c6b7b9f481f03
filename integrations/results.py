"""Results of data-prep jobs in a folder: results files with tensors, and an index of the items.

    FOLDER/results.json               what the results depend on, and how many items a file has
    FOLDER/shard-00000.safetensors    a results file (a shard): the arrays of the first items; or
                                      shard-00000.parquet, or shard-00000.tar for webdataset
    FOLDER/shard-00001.journal        of a results file that is not finished
    FOLDER/index.jsonl                a line for each item; written when the job ends

Writing can stop at any moment, by kill -9 too, and go on later. The finished folder depends on the
items and their results alone: the order of results, kills and earlier failures do not change it.
`docs/dataprep.md` says what is in a file.
"""

from shmload._results.folder import ResultFolder, ResultsReport
from shmload._results.journal import Array
from shmload._results.reading import Results, continued_order

__all__ = ["Array", "ResultFolder", "Results", "ResultsReport", "continued_order"]
