from bnexport.cli import main

main()
