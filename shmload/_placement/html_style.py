"""How the page of a placement looks: light and dark, on a screen of 400 pixels and on paper."""

COLORS = 8
"""How many colors components have."""

# Fills with a contrast of at least 4.5 to the text on them, in either mode.
_LIGHT = ("#a9cdf5", "#f9c58d", "#a8dcae", "#d9bdf0", "#f4b3b3", "#9edfdc", "#e8d98a", "#cfcfcf")
_DARK = ("#1f568f", "#8a4b10", "#256b30", "#643a8c", "#8c2f33", "#17656a", "#6b5a0c", "#55595e")


def _variables(colors: tuple[str, ...]) -> str:
    return "".join(f"--c{number}:{color};" for number, color in enumerate(colors))


_LIGHT_MODE = (
    "--back:#fff;--card:#f6f7f9;--text:#1b1f24;--soft:#57606a;--line:#c4cad1;--arrow:#3d4650;"
    "--free:#fff;--stripe:#8d96a0;" + _variables(_LIGHT)
)
_DARK_MODE = (
    "--back:#0f1318;--card:#181d24;--text:#e8ebef;--soft:#a3adb8;--line:#3a434d;--arrow:#c3ccd6;"
    "--free:#0f1318;--stripe:#6d7782;" + _variables(_DARK)
)
_FILLS = "".join(f".c{number}{{background:var(--c{number})}}" for number in range(COLORS))

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT_MODE}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK_MODE}}}}}"
    """
*{box-sizing:border-box;print-color-adjust:exact;-webkit-print-color-adjust:exact}
body{margin:0;background:var(--back);color:var(--text);font:15px/1.45 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:16px}
h1{font-size:1.4em;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.1em;margin:0 0 .4em;break-after:avoid}
h3{font-size:1em;margin:1em 0 .4em;color:var(--soft);break-after:avoid}
small{font-weight:normal;color:var(--soft);font-size:.9em}
.sum{margin:.2em 0 1.2em;color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;
margin:0 0 14px;break-inside:avoid}
section:last-child{break-inside:auto}
.bar{display:flex;height:44px;border:1px solid var(--stripe);border-radius:4px;overflow:hidden;
background:var(--free)}
.block{container-type:inline-size;flex:0 1 auto;min-width:3px;overflow:hidden;
border-right:1px solid var(--stripe);
display:flex;align-items:center;color:var(--text)}
.block:last-child{border-right:0}
.block span{padding:0 5px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;font-size:.85em}
@container (max-width:64px){.block span{display:none}}
.passing{background:repeating-linear-gradient(45deg,var(--arrow) 0 3px,var(--card) 3px 8px)}
.headroom{background:repeating-linear-gradient(-45deg,var(--line) 0 1px,var(--free) 1px 7px)}
.free{background:var(--free)}
.passing span,.headroom span,.free span{background:var(--free);color:var(--soft);border-radius:3px;
margin:0 3px;padding:0 3px;min-width:0}
.amounts{margin:.35em 0;color:var(--soft);font-size:.9em}
.legend,.arrows{list-style:none;margin:.3em 0 0;padding:0}
.legend li{margin:.2em 0;overflow-wrap:anywhere}
.legend i{display:inline-block;width:.9em;height:.9em;border-radius:3px;margin-right:.5em;
border:1px solid var(--stripe);vertical-align:-.1em}
.size{white-space:nowrap;font-variant-numeric:tabular-nums}
em{color:var(--soft)}
.arrows li{display:flex;align-items:flex-end;gap:8px;margin:.5em 0 .8em;break-inside:avoid}
.end{flex:none;border:1px solid var(--stripe);border-radius:4px;padding:2px 7px;
background:var(--back)}
.way{flex:1;min-width:0;display:flex;flex-direction:column;overflow-wrap:anywhere;font-size:.92em}
.line{position:relative;display:block;height:28px}
.line::before{content:"";position:absolute;left:0;right:12px;top:calc(50% - var(--thick)/2);
height:var(--thick);background:var(--arrow)}
.line::after{content:"";position:absolute;right:0;top:calc(50% - 8px - var(--thick)/4);
border-left:14px solid var(--arrow);border-top:calc(8px + var(--thick)/4) solid transparent;
border-bottom:calc(8px + var(--thick)/4) solid transparent}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9em;font-variant-numeric:tabular-nums}
th,td{padding:3px 12px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;font-size:.85em}
td[style*=right],th[style*=right]{white-space:nowrap}
pre{margin:0;font-size:.88em;white-space:pre-wrap;overflow-wrap:anywhere}
@media (max-width:500px){main{padding:8px}section{padding:10px}th,td{padding-right:8px}
.arrows li{gap:5px}.end{padding:2px 4px}table{font-size:.82em}
td:nth-child(-n+2){overflow-wrap:anywhere}td:first-child{min-width:7.5em}td:nth-child(4){min-width:5em}}
@media print{body{font-size:11pt}main{max-width:none;padding:0}section{border-color:#999}}
""" + _FILLS
)
