"""The paper's studies, from data to table: `t1 reproduce navier-stokes | airfoils | smoke | climate`."""
