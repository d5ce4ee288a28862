SEEN={}
def record(case, form, replicas, verdict, detail):
    SEEN[case.name, form, replicas] = (verdict, detail)
