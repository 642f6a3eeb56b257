# The tools are pinned here and built by Go itself: the first run of each takes a minute or two.
GOLANGCI_LINT := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK   := go run golang.org/x/vuln/cmd/govulncheck@v1.9.0

# The race detector needs a C compiler.
RACE := $(shell command -v cc >/dev/null 2>&1 && echo -race)

# go.work lists the modules, and nothing else does. The pattern "work" is the packages of all of them.
MODULES = $(shell go list -m -f '{{.Dir}}')

# testrun runs go test and prints one line for each reason to skip a test. make lint vets the code. Many tests wait for a lock, and four of
# them at once fit on a server. A package that hangs ends after twenty minutes.
TESTRUN := go run ./internal/testrun
FLAGS   := -vet=off -parallel 4 -timeout 20m

# Packages whose tests need no server, and packages of Go code that is concurrent by itself.
PURE       := ./internal/address ./internal/batch ./internal/bucket ./internal/guard ./internal/shape ./internal/testrun ./internal/testsize \
	./internal/upstream ./internal/words ./promlimit ./ratelimittest ./sloglimit
CONCURRENT := ./internal/batch ./ratelimittest

# VERSION=18 runs the tests on another Postgres than the one on this machine.
ON = $(if $(VERSION),.ci/postgres $(VERSION))

FUZZ ?= 1000000x

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all nightly release general torture fuzz settings mutants cover bench curve compare lint shape tidy fmt vuln

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Run the login example, on a Postgres that it finds or starts
	@go run ./examples/login

quick: ## Test the packages that need no server, while you type
	@$(TESTRUN) -brief -- -short $(FLAGS) $(PURE)

test: ## Test every promise once, on a Postgres that the tests find or start; VERSION=18 fetches that one
	@$(ON) $(TESTRUN) -brief -- -short $(FLAGS) $(ARGS) work
	@$(if $(RACE),$(TESTRUN) -brief -- -short -race $(FLAGS) $(ARGS) $(CONCURRENT),echo "The race detector needs a C compiler: it was left out.")

test-all: ## Run every test at full size, with the race detector, in random order
	@$(ON) $(TESTRUN) $(if $(CI),-expect .ci/skips) -- $(RACE) $(FLAGS) -shuffle=on -count=1 $(ARGS) work

nightly: ## Run everything that takes hours, on Postgres 14 to 18; JOBS="mutants fuzz" picks some
	@.ci/nightly $(JOBS)

release: ## Run what precedes a release: nightly, an hour of torture, and a million inputs for each fuzz target
	@.ci/nightly
	@$(MAKE) --no-print-directory torture ARGS='-minutes 60' fuzz

general: ## Run the tests of the core with the statements that decide by themselves switched off
	go test -tags generalpath -vet=off -shuffle=on -count=1 -parallel 4 -timeout 20m ./integration_test

torture: ## Kill sessions, clients and servers under all calls, and check the accounts: ten minutes, or ARGS='-minutes 60 -seed 7'
	RATELIMIT_NIGHTLY=1 go test $(RACE) -vet=off -count=1 -v -timeout 24h -run '^TestTorture$$' ./integration_test/torture -args -minutes 10 $(ARGS)

fuzz: ## Give each fuzz target a million inputs, or FUZZ=10000x; ONLY=Key picks targets
	@.ci/fuzz '$(FUZZ)' '$(ONLY)'

mutants: ## Break the code in each way that .ci/mutants.tsv lists, and see that make test notices; ONLY=m01,m13 picks some
	@go run .ci/mutants.go '$(ONLY)'

settings: ## Run integration_test under settings of the database that somebody may have made: six runs, or SETTINGS="jit=on,jit_above_cost=0"
	@.ci/settings $(SETTINGS)

cover: ## Run every test and show which lines none of them reached (coverage.html)
	go test -coverprofile=coverage.out -coverpkg=work work
	go tool cover -html=coverage.out -o coverage.html
	@go tool cover -func=coverage.out | tail -n 1

# rueidis takes a minute to compile, the first time.
bench: ## Measure against peers, on servers it starts: some twenty minutes, or ARGS=-quick
	@cd bench && go run -tags rueidis . $(ARGS)

curve: ## Measure calls a second over the number of callers, and draw it: a quarter of an hour
	@cd bench && go run -tags rueidis . -run '^curve' -rounds 9 -seconds 0.5 -svg ../docs/images -json curves.json $(ARGS)

compare: ## Measure this checkout against an earlier commit, in turns: ARGS='-against HEAD~1'
	@cd bench && go run . -against HEAD -contenders '^$$' -rounds 7 -seconds 1 -run '^(take-1|take-16|take-64|take-512|hot-512|tx-1|five-1|five-16)$$' $(ARGS)

lint: ## Check the code, its layout, and each go.mod
	$(GOLANGCI_LINT) run $(addsuffix /...,$(MODULES))
	$(GOLANGCI_LINT) fmt --diff
	@for module in $(MODULES); do (cd "$$module" && echo "go mod tidy -diff in $$module" && go mod tidy -diff) || exit; done
	@go run ./internal/shape -check

shape: ## Print the size of each package beside its budget; UPDATE=1 lowers the budget, ARGS='-v ^branches/shards$$' lists lines
	@go run ./internal/shape $(if $(UPDATE),-update) $(ARGS)

tidy: ## Bring each go.mod in line with what the code imports
	@for module in $(MODULES); do (cd "$$module" && go mod tidy) || exit; done

fmt: ## Lay the code out as lint wants it
	$(GOLANGCI_LINT) fmt

vuln: ## Look for known vulnerabilities in what the code calls
	@for module in $(MODULES); do (cd "$$module" && echo "$$module" && $(GOVULNCHECK) ./...) || exit; done
