# A rank in Perl.
open(my $ranks, ">>", $ENV{PARITY_RANKS}) or die;
print $ranks "$ENV{SLURM_JOB_ID} $ENV{SLURM_PROCID} $ENV{SLURMD_NODENAME}\n";
close($ranks);
sleep(3);
print "rank $ENV{SLURM_PROCID} is done\n";
