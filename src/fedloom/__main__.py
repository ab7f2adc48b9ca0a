from fedloom.cli.main import main

main()
