"""What a hole costs: flows around airfoils rebuilt from few modes, with zeros inside and with filled ones.

    python benchmarks/holes.py FOLDER        # FOLDER/airfoil/openfoam.npz, as for `t1 reproduce airfoils`

Relative L2 of the DCT's lowest modes at the points outside the airfoil, mean over the flows.
"""

import argparse
from pathlib import Path

import transform_once as t1
from transform_once.studies.airfoils import errors, read_flows

MODES = (24, 32, 48, 64, 80, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    flows = read_flows(parser.parse_args().folder / "airfoil" / "openfoam.npz")
    print("| modes | zeros inside | filled |\n| --- | --- | --- |")
    for modes in MODES:
        made = flows.fields, t1.fill(flows.fields, flows.inside, modes)
        rebuilt = (t1.idct(t1.dct(y, 2, modes), 2, y.shape[2:]) for y in made)
        print(f"| {modes} | " + " | ".join(f"{errors(one, flows)['outside']:.4f}" for one in rebuilt) + " |")


if __name__ == "__main__":
    main()
